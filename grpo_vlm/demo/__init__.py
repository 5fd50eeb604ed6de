"""The demo: a tiny Qwen2.5-VL that sees but does not obey, the script that made it, and the script that scores it."""
