"""What a parallel response is: as text (`grammar`), as token ids (`tokens`), as positions and visibility (`layout`)."""
