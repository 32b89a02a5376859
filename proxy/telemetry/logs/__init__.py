"""Files and streams with a line for each request.

In reading order: access_log (the log of the proxy), log_queue (a thread writes it), rejection_log
(when rejections begin and end), capture
(traffic as a trace, without text), usage_ledger (the use of each tenant), tracing (spans of
OpenTelemetry).
"""
