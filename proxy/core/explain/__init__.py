"""Records of decisions, which decide nothing.

In reading order: receipt (one record), recorder (keeps the latest), hindsight (judges rejections
afterwards).

May import policy, state, learn and model.
"""
