/* HdrHistogram_c writes c.hlog and c.hgrm: see README.md. It writes no tags. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "hdr_histogram.h"
#include "hdr_histogram_log.h"
#include "hdr_time.h"

int main(int count, char **folder) {
  char path[4096];
  struct hdr_histogram *all, *one;
  struct hdr_log_writer writer;
  hdr_timespec start = {1700000000, 0};
  hdr_init(1, 3600000000000LL, 3, &all);
  hdr_init(1, 3600000000000LL, 3, &one);
  snprintf(path, sizeof path, "%s/c.hlog", folder[1]);
  FILE *log = fopen(path, "w");
  hdr_log_writer_init(&writer);
  hdr_log_write_header(&writer, log, "made by make.c", &start);
  for (int second = 0; second < 4; second++) {
    hdr_timespec from = {1700000000 + second, 0}, to = {1, 0};
    hdr_reset(one);
    for (long long i = 500 * second; i < 500 * (second + 1); i++)
      hdr_record_value(one, 1000 * (100 + i * i * 7919 % 5000000));
    hdr_log_write(&writer, log, &from, &to, one);
    hdr_add(all, one);
  }
  fclose(log);
  snprintf(path, sizeof path, "%s/c.hgrm", folder[1]);
  FILE *hgrm = fopen(path, "w");
  hdr_percentiles_print(all, hgrm, 5, 1e6, CLASSIC);
  fclose(hgrm);
  return count != 2;
}
