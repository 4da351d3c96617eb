"""`serve`: OpenAI's files and batches on the own machine, and single requests between them."""
