"""Parts that all programs share: flags to configs, prompts from files, exit codes, progress on stderr."""
