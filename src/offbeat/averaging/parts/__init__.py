"""Parts of a shared model: how they are cut, launched, sent and landed."""
