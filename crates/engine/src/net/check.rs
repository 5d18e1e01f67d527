//! Whether this host can give sandboxes a network, for people.

use super::filter::Filter;

use super::{Mode, NetConfig, Network};

/// Tries what the network of sandboxes needs. Everything but reading happens in a namespace that vanishes.
#[must_use]
pub fn check() -> Vec<(&'static str, Result<String, String>)> {
    let mut results = Vec::new();
    let tried = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, try_in_private);
        thread.map_err(|error| error.to_string())?.join().map_err(|_| "the check itself failed".to_owned())
    });
    match tried {
        Ok(tried) => results.extend(tried),
        Err(error) => results.push(("network namespaces", Err(error))),
    }
    results.push(("forwarding", forwarding()));
    results.push(("other packet filters", other_filters()));
    results
}

/// Runs on a thread of its own, which never leaves the namespace it makes.
fn try_in_private() -> Vec<(&'static str, Result<String, String>)> {
    // SAFETY: only the network namespace is left; the table of descriptors stays shared.
    let made = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) };
    if let Err(error) = made {
        let hint = if error == rustix::io::Errno::PERM { ": run as root" } else { "" };
        return vec![("network namespaces", Err(format!("cannot make one: {error}{hint}")))];
    }
    let mut results = vec![("network namespaces", Ok("can be made".to_owned()))];
    let config = NetConfig { instance: "c0ffee".to_owned(), mode: Mode::Internet, ..NetConfig::default() };
    let network = match Network::start(config) {
        Ok(network) => network,
        Err(error) => {
            results.push(("nftables", Err(error.to_string())));
            return results;
        }
    };
    results.push(("nftables", Ok("the rules of sandboxes are accepted".to_owned())));
    let slot = network.make(0).and_then(|slot| network.recycle(&slot).map(|()| slot));
    results.push(match slot {
        Ok(slot) => ("veth", Ok(format!("a slot can be made and reused ({})", slot.address))),
        Err(error) => ("veth", Err(error.to_string())),
    });
    results
}

fn forwarding() -> Result<String, String> {
    const PATH: &str = "/proc/sys/net/ipv4/ip_forward";
    let value = std::fs::read_to_string(PATH).map_err(|error| format!("{PATH}: {error}"))?;
    if value.trim() == "1" {
        return Ok("on".to_owned());
    }
    let writable = std::fs::OpenOptions::new().write(true).open(PATH);
    match writable {
        Ok(_) => Ok("off, the server switches it on and, at the end, off again".to_owned()),
        Err(error) => Err(format!("off, and {PATH} cannot be written: {error}")),
    }
}

/// Filters that drop are let through by rules of ours, except the old kind, which nftables does not show.
fn other_filters() -> Result<String, String> {
    let legacy = std::fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap_or_default();
    if legacy.lines().any(|table| table == "filter") {
        return Err("iptables-legacy is in use: if its FORWARD or INPUT chain drops, sandboxes have no network until \
             it accepts their interfaces (iptables-legacy -I FORWARD -i osb+ -j ACCEPT; the same with -o; \
             iptables-legacy -I INPUT -i osb+ -j ACCEPT)"
            .to_owned());
    }
    let barriers = Filter::open().and_then(|filter| filter.barriers()).map_err(|error| error.to_string())?;
    if barriers.is_empty() {
        return Ok("none that drops".to_owned());
    }
    Ok(format!("these drop by default and get an accept for sandboxes: {}", barriers.join("; ")))
}
