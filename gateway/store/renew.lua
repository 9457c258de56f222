-- ARGV  any number of: lease, what it takes. A lease that this server does not know (it expired, or the
-- data was lost) is counted again, even above a limit: its request runs. Without leases, this reads the
-- sums and reclaims what has expired.

check()
for i = OWN_ARGUMENTS, #ARGV, COUNTERS + 1 do
    local lease, claim = ARGV[i], arguments(i + 1)
    if is_gone(lease) then
        -- Given back while this command was under way.
    elseif is_held(lease) then
        extend(lease)
        shrink(lease, claim)
    else
        add(lease, claim)
    end
end
reclaim()
return finish(0)
