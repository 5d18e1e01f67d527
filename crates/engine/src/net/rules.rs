//! The instance's own packet filter table: what sandboxes may reach.
//!
//! One table of family `inet`, replaced as a whole in one transaction, so that no packet ever meets half of it. Rules
//! know slots by the beginning of their interface names and by routes, not by elements of sets: making and removing
//! a slot changes nothing here.

use std::net::Ipv4Addr;

use nlink::netlink::nftables::{
    BaseChain, Chain, ChainName, CtState, Family, FibFlags, Field, FilterHook, IcmpxCode, Match, NatHook,
    NatStatement, PacketField, PktType, Policy, Priority, Rule, Set, SetElement, SetKeyType, Transaction,
    Value,
};

use super::Mode;
use super::address::{Cidr, Plan, merge};

/// Not the internet: this host, private networks, neighbours on the link (cloud metadata among them), carriers'
/// networks, documentation, benchmarks, relays, multicast, reserved, broadcast.
const SPECIAL: [Cidr; 15] = [
    Cidr::new(Ipv4Addr::new(0, 0, 0, 0), 8),
    Cidr::new(Ipv4Addr::new(10, 0, 0, 0), 8),
    Cidr::new(Ipv4Addr::new(100, 64, 0, 0), 10),
    Cidr::new(Ipv4Addr::new(127, 0, 0, 0), 8),
    Cidr::new(Ipv4Addr::new(169, 254, 0, 0), 16),
    Cidr::new(Ipv4Addr::new(172, 16, 0, 0), 12),
    Cidr::new(Ipv4Addr::new(192, 0, 0, 0), 24),
    Cidr::new(Ipv4Addr::new(192, 0, 2, 0), 24),
    Cidr::new(Ipv4Addr::new(192, 88, 99, 0), 24),
    Cidr::new(Ipv4Addr::new(192, 168, 0, 0), 16),
    Cidr::new(Ipv4Addr::new(198, 18, 0, 0), 15),
    Cidr::new(Ipv4Addr::new(198, 51, 100, 0), 24),
    Cidr::new(Ipv4Addr::new(203, 0, 113, 0), 24),
    Cidr::new(Ipv4Addr::new(224, 0, 0, 0), 4),
    Cidr::new(Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// What even [`Mode::Open`] never forwards: addresses that mean nothing beyond a host or a link.
const NEVER: [Cidr; 4] = [
    Cidr::new(Ipv4Addr::new(0, 0, 0, 0), 8),
    Cidr::new(Ipv4Addr::new(127, 0, 0, 0), 8),
    Cidr::new(Ipv4Addr::new(224, 0, 0, 0), 4),
    Cidr::new(Ipv4Addr::new(240, 0, 0, 0), 4),
];

pub(super) const FAMILY: Family = Family::Inet;
pub(super) const DNS: u16 = 53;
/// Packets of connections that the other side was allowed to begin.
const ANSWERS: CtState = CtState(CtState::ESTABLISHED.0 | CtState::RELATED.0);
const ECHO_REQUEST: u8 = 8;
const V6: u8 = libc::NFPROTO_IPV6 as u8;
const BLOCKED: &str = "blocked";
const ALLOWED: &str = "allowed";
const ALLOWED_HOST: &str = "allowed_host";
const FROM_SLOT: &str = "from_slot";
const TO_HOST: &str = "to_host";
const TO_SLOT: &str = "to_slot";

/// What the table depends on.
#[derive(Debug, Clone)]
pub(super) struct Policies {
    pub(super) plan: Plan,
    pub(super) mode: Mode,
    pub(super) allow_private: Vec<Cidr>,
    /// Where the DNS forwarder listens; another port than 53 is redirected to.
    pub(super) dns_port: u16,
    /// Kept as the table's comment.
    pub(super) note: String,
}

/// The table, ready to be sent.
#[derive(Debug)]
pub(super) struct Ruleset {
    table: String,
    note: String,
    chains: Vec<Chain>,
    sets: Vec<(Set, Vec<SetElement>)>,
    rules: Vec<Rule>,
}

impl Ruleset {
    /// Writes down what `policies` mean.
    pub(super) fn new(policies: &Policies) -> nlink::Result<Self> {
        let mut ruleset = Self {
            table: policies.plan.table(),
            note: policies.note.clone(),
            chains: Vec::new(),
            sets: Vec::new(),
            rules: Vec::new(),
        };
        ruleset.arrivals(policies)?;
        ruleset.input(policies)?;
        ruleset.forward(policies)?;
        ruleset.nat(policies)?;
        Ok(ruleset)
    }

    /// Puts everything into a transaction. `replace`: the table exists and goes in the same step.
    pub(super) fn stage(self, mut transaction: Transaction, replace: bool) -> Transaction {
        if replace {
            transaction = transaction.del_table(&self.table, FAMILY);
        }
        transaction = transaction.add_table_with_comment(&self.table, FAMILY, 0, Some(&self.note));
        for (set, elements) in self.sets {
            transaction = transaction.add_set(set.clone()).add_set_elements(&set, &elements);
        }
        for chain in self.chains {
            transaction = transaction.add_chain(chain);
        }
        self.rules.into_iter().fold(transaction, Transaction::add_rule)
    }

    /// Before anything else: no IPv6, and only the slot's own source address, which is the one that the route back
    /// leads to.
    fn arrivals(&mut self, policies: &Policies) -> nlink::Result<()> {
        let prefix = policies.plan.slot_prefix();
        let chain = "arrivals";
        self.chain(chain, Some(BaseChain::filter(FilterHook::Prerouting, Priority::Raw)))?;
        self.rule(chain, |rule| rule.match_iif_prefix(&prefix).then(Match::eq(Field::NfProto, V6)).drop());
        self.rule(chain, |rule| {
            rule.match_iif_prefix(&prefix).match_fib_missing(FibFlags::SADDR | FibFlags::IIF).drop()
        });
        Ok(())
    }

    /// To the host itself: DNS and ping at the gateway address, answers, nothing else. The forwarder answers both
    /// over UDP and TCP.
    fn input(&mut self, policies: &Policies) -> nlink::Result<()> {
        let gateway = policies.plan.gateway();
        self.chain(TO_HOST, None)?;
        let to_host = ChainName::new(TO_HOST)?;
        self.rule(TO_HOST, |rule| rule.match_ct_state(ANSWERS).accept());
        let port = policies.dns_port;
        self.rule(TO_HOST, |rule| rule.match_daddr_v4(gateway, 32).match_udp_dport(port).accept());
        self.rule(TO_HOST, |rule| rule.match_daddr_v4(gateway, 32).match_tcp_dport(port).accept());
        self.rule(TO_HOST, |rule| rule.match_daddr_v4(gateway, 32).match_icmp_type(ECHO_REQUEST).accept());
        let named: Vec<Cidr> =
            policies.allow_private.iter().copied().filter(|range| range.prefix() == 32).collect();
        if !named.is_empty() {
            self.set(ALLOWED_HOST, &named);
            self.rule(TO_HOST, |rule| {
                rule.match_in_interval_set(PacketField::Ip4Daddr, ALLOWED_HOST).accept()
            });
        }
        self.refuse(TO_HOST, |rule| rule.match_pkttype(PktType::Host));
        self.rule(TO_HOST, Rule::drop);

        self.chain("input", Some(BaseChain::filter(FilterHook::Input, Priority::Filter)))?;
        self.rule("input", |rule| rule.match_iif_prefix(&policies.plan.slot_prefix()).jump(to_host));
        Ok(())
    }

    /// Through the host: never from slot to slot, outwards by destination, inwards only answers.
    fn forward(&mut self, policies: &Policies) -> nlink::Result<()> {
        let prefix = policies.plan.slot_prefix();
        self.chain(FROM_SLOT, None)?;
        self.chain(TO_SLOT, None)?;
        let (from_slot, to_slot) = (ChainName::new(FROM_SLOT)?, ChainName::new(TO_SLOT)?);

        self.rule(TO_SLOT, |rule| rule.match_ct_state(ANSWERS).accept());
        self.rule(TO_SLOT, Rule::drop);

        self.rule(FROM_SLOT, |rule| rule.match_ct_state(ANSWERS).accept());
        self.rule(FROM_SLOT, |rule| rule.match_ct_state(CtState::INVALID).drop());
        if !policies.allow_private.is_empty() {
            self.set(ALLOWED, &policies.allow_private);
            self.rule(FROM_SLOT, |rule| rule.match_in_interval_set(PacketField::Ip4Daddr, ALLOWED).accept());
        }
        let blocked = match policies.mode {
            Mode::Open => &NEVER[..],
            Mode::Internet | Mode::None => &SPECIAL[..],
        };
        self.set(BLOCKED, blocked);
        self.refuse(FROM_SLOT, |rule| rule.match_in_interval_set(PacketField::Ip4Daddr, BLOCKED));
        self.rule(FROM_SLOT, Rule::accept);

        let chain = "forward";
        self.chain(chain, Some(BaseChain::filter(FilterHook::Forward, Priority::Filter)))?;
        self.rule(chain, |rule| rule.match_iif_prefix(&prefix).match_oif_prefix(&prefix).drop());
        self.rule(chain, |rule| rule.match_oif_prefix(&prefix).jump(to_slot));
        self.rule(chain, |rule| rule.match_iif_prefix(&prefix).jump(from_slot));
        Ok(())
    }

    fn nat(&mut self, policies: &Policies) -> nlink::Result<()> {
        let Policies { plan, dns_port, .. } = policies;
        let prefix = plan.slot_prefix();
        if *dns_port != DNS {
            let chain = "dns";
            self.chain(chain, Some(BaseChain::nat(NatHook::Prerouting, Priority::DstNat)))?;
            for udp in [true, false] {
                self.rule(chain, |rule| {
                    let rule = rule.match_iif_prefix(&prefix).match_daddr_v4(plan.gateway(), 32);
                    let rule = if udp { rule.match_udp_dport(DNS) } else { rule.match_tcp_dport(DNS) };
                    // A `redirect` would look for an address on the slot's interface, which has none.
                    rule.nat(NatStatement::dnat(plan.gateway()).port(*dns_port))
                });
            }
        }
        let chain = "masquerade";
        self.chain(chain, Some(BaseChain::nat(NatHook::Postrouting, Priority::SrcNat)))?;
        self.rule(chain, |rule| {
            rule.match_saddr_v4(plan.pool().first(), plan.pool().prefix())
                .then(Match::ne(Field::Oifname, Value::NamePrefix(prefix)))
                .masquerade()
        });
        Ok(())
    }

    fn chain(&mut self, name: &str, base: Option<BaseChain>) -> nlink::Result<()> {
        let mut chain = Chain::new(self.table.as_str(), name)?.family(FAMILY);
        if let Some(base) = base {
            chain = chain.base(base.policy(Policy::Accept));
        }
        self.chains.push(chain);
        Ok(())
    }

    fn set(&mut self, name: &str, ranges: &[Cidr]) {
        let set = Set::new(&self.table, name).family(FAMILY).key_type(SetKeyType::Ipv4Addr).interval();
        let elements =
            merge(ranges).into_iter().map(|(first, last)| SetElement::ipv4_range(first, last)).collect();
        self.sets.push((set, elements));
    }

    /// Says no, so that programs fail at once and not after minutes. A reset is for TCP alone, but comes every time,
    /// where the number of ICMP messages is limited.
    fn refuse(&mut self, chain: &str, matching: impl Fn(Rule) -> Rule) {
        self.rule(chain, |rule| matching(rule).reject_tcp_reset());
        self.rule(chain, |rule| matching(rule).reject_icmpx(IcmpxCode::AdminProhibited));
    }

    fn rule(&mut self, chain: &str, rule: impl FnOnce(Rule) -> Rule) {
        self.rules.push(rule(Rule::new(&self.table, chain).family(FAMILY)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(mode: Mode, allow: &[&str], dns_port: u16) -> Vec<String> {
        let policies = Policies {
            plan: Plan::new("abcdef", "10.231.0.0/16".parse().unwrap()).unwrap(),
            mode,
            allow_private: allow.iter().map(|range| range.parse().unwrap()).collect(),
            dns_port,
            note: String::new(),
        };
        let ruleset = Ruleset::new(&policies).unwrap();
        ruleset.rules.iter().map(|rule| rule.nft_syntax().unwrap()).collect()
    }

    #[test]
    fn the_usual_table_says_what_it_should() {
        assert_eq!(
            rules(Mode::Internet, &[], DNS),
            [
                "iifname \"osbabcdefv*\" meta nfproto ipv6 drop",
                "iifname \"osbabcdefv*\" fib saddr . iif oif missing drop",
                "ct state established,related accept",
                "ip daddr 10.231.0.1 udp dport 53 accept",
                "ip daddr 10.231.0.1 tcp dport 53 accept",
                "ip daddr 10.231.0.1 icmp type echo-request accept",
                "meta pkttype host meta l4proto tcp reject with tcp reset",
                "meta pkttype host reject with icmpx admin-prohibited",
                "drop",
                "iifname \"osbabcdefv*\" jump to_host",
                "ct state established,related accept",
                "drop",
                "ct state established,related accept",
                "ct state invalid drop",
                "ip daddr @blocked meta l4proto tcp reject with tcp reset",
                "ip daddr @blocked reject with icmpx admin-prohibited",
                "accept",
                "iifname \"osbabcdefv*\" oifname \"osbabcdefv*\" drop",
                "oifname \"osbabcdefv*\" jump to_slot",
                "iifname \"osbabcdefv*\" jump from_slot",
                "ip saddr 10.231.0.0/16 oifname != \"osbabcdefv*\" masquerade",
            ]
        );
    }

    #[test]
    fn opened_ranges_and_another_dns_port_add_rules() {
        let usual = rules(Mode::Internet, &[], DNS);
        let more = rules(Mode::Open, &["10.1.0.0/16", "192.168.1.5"], 4053);
        let added: Vec<&str> =
            more.iter().map(String::as_str).filter(|rule| !usual.iter().any(|known| known == rule)).collect();
        assert_eq!(
            added,
            [
                "ip daddr 10.231.0.1 udp dport 4053 accept",
                "ip daddr 10.231.0.1 tcp dport 4053 accept",
                "ip daddr @allowed_host accept",
                "ip daddr @allowed accept",
                "iifname \"osbabcdefv*\" ip daddr 10.231.0.1 udp dport 53 dnat ip to 10.231.0.1:4053",
                "iifname \"osbabcdefv*\" ip daddr 10.231.0.1 tcp dport 53 dnat ip to 10.231.0.1:4053",
            ]
        );
    }
}
