"""Advice on the method to use with a number of labeled validation samples, from experiments/splits.py."""

FEWEST = 250  # validation samples, 2.5 per class of the experiment, with which the default is better in every metric


def advise(samples: int) -> str:
    """Return one sentence for a number of validation samples; experiments/splits.py tried 50 to 5,000."""
    if samples >= FEWEST:
        return (
            f"With {samples:,} labeled samples: the default method, auto, and for accuracy the learned exit score. In "
            "five splits of the shipped trace both beat temperature and the paper's method with 250 labels as with "
            "5,000."
        )
    return (
        f"With {samples:,} labeled samples: the default method, auto, for accuracy and NLPD, and temperature alone "
        f"(T_opt) for the ECE; with {FEWEST} or more, auto was better in all three."
    )


def note_few_labels(samples: int) -> list[str]:
    """Return a note if there are so few labeled validation samples that no method is best in all, else nothing."""
    if samples >= FEWEST:
        return []
    return [
        f"There are only {samples} labeled validation samples: calibration and thresholds are rough. Collect at least "
        f"{FEWEST}. With fewer, auto gains accuracy and NLPD, but --method T_opt may have the smaller ECE."
    ]
