"""Where documents come from: files, archives, tables, the embedded corpus."""
