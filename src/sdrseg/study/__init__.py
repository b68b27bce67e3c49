"""Studies: many runs as one file, their results as small files, tables, figures and tuning."""
