"""Child processes of a launcher, the ports on which they listen, and the credentials that they
use."""
