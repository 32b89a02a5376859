"""The metrics of /metrics.

In reading order: proxy_metrics (all of them), counters (of requests and errors), backend_metrics
(of each backend), decision_metrics (of predictions and rejections), scaling_metrics (for
autoscalers), past_metrics (the last hour), live_history (the last 15 minutes of the live page),
tenant_labels (a bounded number of tenants as labels).

A new metric that is counted at requests is a line of ProxyMetrics. A state that is read at each
scrape belongs to BackendMetrics, or to DecisionMetrics.
"""
