"""Report the work of the proxy: metrics and logs, each a room.

In reading order: record (one request), observers (tell metrics and logs of it), log_events (the
names of log lines), recent_events (the last of them), hlog (histograms as text), histogram_log
(a file of them). The rooms are metrics (for Prometheus) and logs (a line for each request).

May import the shaper of core, config and http1.
"""
