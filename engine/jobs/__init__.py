"""Everything that resumes: one ``Run``, digests of its inputs, and what trainings share."""
