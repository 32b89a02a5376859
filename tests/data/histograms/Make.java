// Java's HdrHistogram writes java.hlog and java.hgrm: see README.md.
import java.io.PrintStream;
import org.HdrHistogram.Histogram;
import org.HdrHistogram.HistogramLogWriter;

class Make {
  public static void main(String[] folder) throws Exception {
    Histogram all = new Histogram(3_600_000_000_000L, 3);
    HistogramLogWriter log = new HistogramLogWriter(folder[0] + "/java.hlog");
    log.outputLogFormatVersion();
    log.outputStartTime(1_700_000_000_000L);
    log.setBaseTime(1_700_000_000_000L);
    log.outputBaseTime(1_700_000_000_000L);
    log.outputLegend();
    for (int second = 0; second < 4; second++) {
      Histogram one = new Histogram(3_600_000_000_000L, 3);
      one.setTag(second % 2 == 1 ? "chat" : null);
      one.setStartTimeStamp(1_700_000_000_000L + 1000 * second);
      one.setEndTimeStamp(1_700_000_001_000L + 1000 * second);
      for (long i = 500 * second; i < 500 * (second + 1); i++)
        one.recordValue(1000 * (100 + i * i * 7919 % 5_000_000));
      log.outputIntervalHistogram(one);
      all.add(one);
    }
    log.close();
    try (PrintStream hgrm = new PrintStream(folder[0] + "/java.hgrm")) {
      all.outputPercentileDistribution(hgrm, 5, 1e6);
    }
  }
}
