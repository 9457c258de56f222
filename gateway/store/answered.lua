-- ARGV  lease, what it takes from now on. A lease that is not held is left alone.

check()
if is_held(ARGV[OWN_ARGUMENTS]) then
    shrink(ARGV[OWN_ARGUMENTS], arguments(OWN_ARGUMENTS + 1))
end
return finish(0)
