"""What a run is made of, as frozen, validated dataclasses. No torch."""
