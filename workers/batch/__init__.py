"""Operations that were checked, and the micro-batches made of them."""
