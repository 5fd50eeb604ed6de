"""The training loop: collect rollouts, batch them, update the policy, validate, save."""
