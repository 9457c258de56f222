-- ARGV  id. Returns the job, briefly, or nothing.

return show(ARGV[OWN_ARGUMENTS], true)
