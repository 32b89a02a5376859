"""Metrics: what /metrics shows.

In reading order: proxy_metrics (all of them), counters (of requests and errors), backend_metrics
(of each backend), decision_metrics (of predictions and rejections), past_metrics (the last hour),
tenant_labels (a bounded number of tenants as labels).
"""
