"""Worker processes that call reward functions with limits on time and memory."""
