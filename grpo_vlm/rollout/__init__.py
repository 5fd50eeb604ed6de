"""Rollouts: completions for prompts, sampled with the current weights by a vLLM server or by transformers.

Nothing is imported here: the server's own processes import modules of this package (file_weights, auth) and must stay
light.
"""
