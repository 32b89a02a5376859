// hdrhistogram-go writes go.hlog and go.hgrm: see README.md.
package main

import (
	"os"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	file, err := os.Create(os.Args[1] + "/go.hlog")
	check(err)
	log, whole := hdr.NewHistogramLogWriter(file), hdr.New(1, 3_600_000_000_000, 3)
	const start int64 = 1_700_000_000_000
	check(log.OutputLogFormatVersion())
	check(log.OutputStartTime(start))
	check(log.OutputBaseTime(start))
	log.SetBaseTime(start)
	check(log.OutputLegend())
	for second := int64(0); second < 4; second++ {
		one := hdr.New(1, 3_600_000_000_000, 3)
		if second%2 == 1 {
			one.SetTag("chat")
		}
		one.SetStartTimeMs(start + 1000*second)
		one.SetEndTimeMs(start + 1000*(second+1))
		for i := 500 * second; i < 500*(second+1); i++ {
			check(one.RecordValue(1_000 * (100 + i*i*7_919%5_000_000)))
		}
		check(log.OutputIntervalHistogram(one))
		whole.Merge(one)
	}
	file, err = os.Create(os.Args[1] + "/go.hgrm")
	check(err)
	_, err = whole.PercentilesPrint(file, 5, 1e6)
	check(err)
}
