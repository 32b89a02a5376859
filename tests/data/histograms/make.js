// hdr-histogram-js writes js.hlog and js.hgrm: see README.md.
const fs = require("fs");
const hdr = require("hdr-histogram-js");

const options = {bitBucketSize: 64, lowestDiscernibleValue: 1, highestTrackableValue: 3.6e12, numberOfSignificantValueDigits: 3};
const lines = [], all = hdr.build(options), log = new hdr.HistogramLogWriter(line => lines.push(line));
log.outputLogFormatVersion();
log.outputStartTime(1_700_000_000_000);
log.baseTime = 1_700_000_000_000;
log.outputLegend();
for (let second = 0; second < 4; second++) {
  const one = hdr.build(options);
  if (second % 2) one.tag = "chat";
  one.startTimeStampMsec = 1_700_000_000_000 + 1000 * second;
  one.endTimeStampMsec = 1_700_000_001_000 + 1000 * second;
  for (let i = 500 * second; i < 500 * (second + 1); i++) one.recordValue(1000 * (100 + i * i * 7919 % 5_000_000));
  log.outputIntervalHistogram(one);
  all.add(one);
}
fs.writeFileSync(process.argv[2] + "/js.hlog", lines.join(""));
fs.writeFileSync(process.argv[2] + "/js.hgrm", all.outputPercentileDistribution(5, 1e6));
