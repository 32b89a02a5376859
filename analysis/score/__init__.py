"""Score the answers of a run.

In reading order: `score` reads the answers and writes the scores, `answer_metrics` compares one
answer with the expected one. The room imports no other part of `forebay.analysis`.
"""
