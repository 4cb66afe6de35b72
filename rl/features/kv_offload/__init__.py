"""The KV cache of ended turns in host memory."""
