"""Report the work of the proxy: metrics and logs, each a room.

In reading order: record (one request), observers (tell metrics and logs of it), recent_events
(the last log lines), histogram_log (histograms in a file). The rooms are metrics
(for Prometheus) and logs (a line for each request).

May import the shaper of core, config and http1.
"""
