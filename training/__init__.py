"""How the models that the package ships were made: `python -m training.demo`, `python -m training.stream`."""
