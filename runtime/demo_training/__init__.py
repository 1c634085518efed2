"""Train the small Mixture-of-Experts model, its tokenizer and its draft that ship in `traces/`.

Run `python -m runtime.demo_training --out DIR`. Nothing else in the project imports this package.
"""
