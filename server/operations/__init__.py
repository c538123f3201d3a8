"""Operations of a run, one class each."""
