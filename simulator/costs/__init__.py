"""Terms of the cost model, one idea a file: what each piece of a pass takes, from which numbers of the profile."""
