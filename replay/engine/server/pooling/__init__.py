"""Embeddings, rerankings and scores, in the shapes of vLLM 0.32, under --convert embed or classify.

`bodies` reads requests, `vectors` makes the numbers, `pooler` serves the paths.
"""
