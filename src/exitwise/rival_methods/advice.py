"""Advice on the method to use with a number of labeled validation samples, from experiments/splits.py."""

FEWEST = 250  # validation samples in the experiment, 2.5 per class


def advise(samples: int) -> str:
    """Return one sentence for a number of validation samples; experiments/splits.py tried 250 to 5,000."""
    if samples >= FEWEST:
        return (
            f"With {samples:,} labeled samples: the default method, auto, and for accuracy the learned exit score. In "
            "five splits of the shipped trace both beat temperature and the paper's method with 250 labels as with "
            "5,000."
        )
    return (
        f"With {samples:,} labeled samples: Pool or PoE without Laplace, or temperature alone if the table shows no "
        f"clear gain; fewer than {FEWEST} were not tried, so that more labels are worth their price."
    )


def note_few_labels(samples: int) -> list[str]:
    """Return a note if there are fewer labeled validation samples than any method was tried with, else nothing."""
    if samples >= FEWEST:
        return []
    return [
        f"There are only {samples} labeled validation samples: calibration and thresholds are rough. Collect at least "
        f"{FEWEST}, or choose the simplest method with --method T_opt --score confidence."
    ]
