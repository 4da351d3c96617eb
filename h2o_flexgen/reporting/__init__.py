"""From records to text, tables and pictures. No torch."""
