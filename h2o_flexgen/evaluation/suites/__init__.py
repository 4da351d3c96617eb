"""The laboratory: policies at several budgets on several models, by tasks from a file."""
