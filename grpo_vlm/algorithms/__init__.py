"""Pure arithmetic of GRPO: advantages, policy losses, KL estimators, importance weights, filters. Imports torch and
nothing above it.

Shape legend: B samples of the batch, T completion tokens (right-padded), so `[B, T]` is one value per completion
token.
"""
