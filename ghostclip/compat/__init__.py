"""Other libraries' interfaces over this one's engine, for programs that were written against them."""
