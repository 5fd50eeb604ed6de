"""The policy: loading it, and reading per-token log-probs out of it."""
