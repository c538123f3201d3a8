"""Many ranks for one base model: what each of them holds, and what they tell each other."""
