//! Living with other tools and other instances on the same host.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use osb_engine::net::{NetConfig, NetError, Network};

use crate::world::{
    HOST, PORT, PUBLIC, Space, config, eventually, fake_dns, inside, read, remains, resolve, root, run,
    runtime, say, serve, visit, world,
};

#[test]
fn chains_of_others_that_drop_let_sandboxes_through() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let filters = [
            // As Docker and ufw leave them behind.
            "table ip filter { chain DOCKER-USER { return; }; \
               chain FORWARD { type filter hook forward priority filter; policy drop; jump DOCKER-USER; \
                 oifname \"docker0\" accept; }; \
               chain INPUT { type filter hook input priority filter; policy drop; iif lo accept; \
                 ct state established accept; }; }",
            // As firewalld does.
            "table inet firewalld { \
               chain filter_FORWARD { type filter hook forward priority filter + 10; policy accept; \
                 ct state established,related accept; reject with icmpx admin-prohibited; }; \
               chain filter_INPUT { type filter hook input priority filter + 10; policy accept; \
                 ct state established,related accept; iif lo accept; reject with icmpx admin-prohibited; }; }",
        ];
        let install = |filter: &str| {
            std::fs::write(format!("/tmp/osb-net-test-{}", rustix::thread::gettid()), filter).unwrap();
            run(&format!("nft -f /tmp/osb-net-test-{0}; rm /tmp/osb-net-test-{0}", rustix::thread::gettid()));
        };
        let runtime = runtime();
        let _guard = runtime.enter();
        let config = NetConfig { dns_servers: Some(vec![fake_dns()]), ..config() };
        for filter in filters {
            for late in [false, true] {
                let network = if late {
                    let network = Network::start(config.clone()).unwrap();
                    install(filter);
                    eventually(|| read("nft list ruleset").matches("comment \"osb-abcdef\"").count() == 3);
                    network
                } else {
                    install(filter);
                    Network::start(config.clone()).unwrap()
                };
                let forwarder = network.serve_dns().unwrap();
                let slot = network.make(0).unwrap();
                assert_eq!(visit(&slot, PUBLIC).unwrap(), HOST);
                resolve(&slot).unwrap();
                assert!(visit(&slot, "10.9.9.9").is_err() && visit(&slot, HOST).is_err());
                if filter.contains("DOCKER") {
                    let chain = read("nft list chain ip filter FORWARD");
                    let place = |text: &str| chain.find(text).unwrap();
                    assert!(place("jump DOCKER-USER") < place("osb-abcdef"), "{chain}");
                    assert!(place("osb-abcdef") < place("docker0"), "{chain}");
                    run("nft insert rule ip filter DOCKER-USER drop");
                    assert!(visit(&slot, PUBLIC).is_err(), "the administrator's chain comes first");
                }
                network.purge().unwrap();
                assert!(!read("nft list ruleset").contains("osb"), "all is taken back");
                drop(forwarder);
                run("nft flush ruleset");
            }
        }
    });
}

#[test]
fn docker_on_the_same_host_changes_nothing() {
    if !root() {
        return;
    }
    if read("command -v dockerd").is_empty() {
        say("skipped: needs dockerd");
        return;
    }
    let (host, _internet) = world();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap().to_owned();
    host.run(move || {
        let network = Network::start(config()).unwrap();
        let slot = network.make(0).unwrap();
        // Forwarding is on already, so it would leave the policy alone: it has to meet a host without sandboxes.
        run("sysctl -qw net.ipv4.ip_forward=0");
        let mut docker = Command::new("dockerd")
            .args(["--exec-opt", "native.cgroupdriver=cgroupfs", "--oom-score-adjust", "0"])
            .args([
                "--host",
                &format!("unix://{path}/docker.sock"),
                "--pidfile",
                &format!("{path}/docker.pid"),
            ])
            .args(["--data-root", &format!("{path}/data"), "--exec-root", &format!("{path}/exec")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let chain = || read("iptables -S FORWARD");
        let began = Instant::now();
        while !(chain().contains("-P FORWARD DROP") && chain().contains("osb-abcdef")) {
            assert!(began.elapsed() < Duration::from_secs(30), "{}", read("iptables -S; nft list ruleset"));
            std::thread::sleep(Duration::from_millis(20));
        }
        let text = chain();
        assert!(text.contains("-i osbabcdefv+ -m comment --comment osb-abcdef -j ACCEPT"), "{text}");
        assert_eq!(visit(&slot, PUBLIC).unwrap(), HOST);
        assert!(visit(&slot, "172.17.0.1").is_err(), "Docker's own network");
        run(&format!("kill {}", docker.id()));
        docker.wait().unwrap();
        network.purge().unwrap();
        assert!(!read("iptables -S; nft list ruleset").contains("osb"));
    });
}
#[test]
fn a_table_that_is_taken_away_comes_back() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let network = Network::start(config()).unwrap();
        let slot = network.make(0).unwrap();
        let table = || read("nft list table inet osb-abcdef");
        let whole = table();
        for tampering in [
            "nft flush ruleset",
            "nft delete table inet osb-abcdef",
            "nft flush chain inet osb-abcdef from_slot",
            "nft insert rule inet osb-abcdef forward accept",
        ] {
            run(tampering);
            eventually(|| table() == whole);
            assert!(visit(&slot, HOST).is_err() && visit(&slot, "10.9.9.9").is_err(), "{tampering}");
            assert_eq!(visit(&slot, PUBLIC).unwrap(), HOST, "{tampering}");
        }
        network.purge().unwrap();
    });
}

#[test]
fn pools_are_chosen_and_refused() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let config = |instance: &str, pool: Option<&str>| NetConfig {
            instance: instance.to_owned(),
            pool: pool.map(|pool| pool.parse().unwrap()),
            ..NetConfig::default()
        };
        run("ip route add 10.231.8.0/24 via 192.168.77.1");
        let network = Network::start(config("abcdef", None)).unwrap();
        assert_eq!(network.pool().unwrap().to_string(), "10.232.0.0/16");
        let second = Network::start(config("abcdef12", None)).unwrap();
        assert_eq!(second.pool().unwrap().to_string(), "10.233.0.0/16");
        let slots = (network.make(0).unwrap(), second.make(0).unwrap());
        assert_eq!(
            (visit(&slots.0, PUBLIC).unwrap(), visit(&slots.1, PUBLIC).unwrap()),
            (HOST.into(), HOST.into())
        );
        inside(&slots.1.netns, || serve(&format!("0.0.0.0:{PORT}")));
        assert!(visit(&slots.0, &slots.1.address.to_string()).is_err(), "nor sandboxes of another instance");

        let before = remains();
        let error = Network::start(config("fedcba", Some("10.231.0.0/16"))).unwrap_err();
        assert!(error.to_string().contains("10.231.8.0/24") && error.to_string().contains("up0"), "{error}");
        assert!(matches!(Network::start(config("fedcba", Some("10.1.0.0/30"))), Err(NetError::PoolSize(_))));
        assert!(matches!(Network::start(config("x", None)), Err(NetError::Instance(_))));
        assert_eq!(remains(), before, "a start that fails leaves nothing");
        let third = Network::start(config("fedcba", Some("10.1.0.0/28"))).unwrap();
        assert_eq!(third.slots(), 13);
        assert!(matches!(third.make(13), Err(NetError::NoSuchSlot { .. })));
        third.stop().unwrap();
        network.purge().unwrap();
        assert_eq!(
            visit(&slots.1, PUBLIC).unwrap(),
            HOST,
            "forwarding stays while another instance needs it"
        );
        second.purge().unwrap();
        assert_eq!(read("cat /proc/sys/net/ipv4/ip_forward").trim(), "0");
    });
}

#[test]
fn the_check_passes_here() {
    if !root() {
        return;
    }
    let host = Space::new();
    host.run(|| {
        let before = remains();
        for (name, result) in osb_engine::net::check() {
            assert!(result.is_ok(), "{name}: {result:?}");
        }
        assert_eq!(remains(), before);
    });
}

#[test]
fn a_chain_that_cannot_be_changed_stops_nothing_else() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        // A table that belongs to the program that made it, as newer firewalld keeps its own.
        let mut owner =
            Command::new("nft").arg("-i").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let rules = "table inet owned { flags owner; \
                     chain forward { type filter hook forward priority 0; policy drop; }; }\n";
        owner.stdin.as_mut().unwrap().write_all(rules.as_bytes()).unwrap();
        eventually(|| read("nft list ruleset").contains("flags owner"));
        run("nft add table ip filter; \
             nft add chain ip filter FORWARD '{ type filter hook forward priority 0; policy drop; }'");
        let network = Network::start(config()).unwrap();
        let slot = network.make(0).unwrap();
        assert!(read("nft list table ip filter").contains("osb-abcdef"));
        assert!(visit(&slot, PUBLIC).is_err());
        drop(owner.stdin.take());
        owner.wait().unwrap();
        eventually(|| visit(&slot, PUBLIC).is_ok());
        network.purge().unwrap();
        assert!(!read("nft list ruleset").contains("osb"));
    });
}
