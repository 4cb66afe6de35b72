"""Options of a run, a folder each. `rl.config.wing` says which config needs which."""
