"""What a job or a sweep did, for people: numbers from its files, pictures, one page, the terminal."""
