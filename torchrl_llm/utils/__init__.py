"""What any program needs, and nothing of language models: options that check themselves, files,
signals, optional packages."""
