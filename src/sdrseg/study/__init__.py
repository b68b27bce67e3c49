"""Studies: many experiments in one file, a small result file per run, tables, figures and tuning."""
