"""Contenders for `ghostclip.bench` that one script each compares: `ghostclip.bench.register` takes these modules."""
