"""Metrics: what /metrics shows.

In reading order: proxy_metrics (all of them), counters (of requests and errors), backend_metrics
(of each backend), decision_metrics (of predictions and rejections), tenant_labels (a bounded number
of tenants as labels).
"""
