//! Packet filters of other tools that would drop what sandboxes send.
//!
//! An accept in our table does not outvote a drop in another one, so where a chain of Docker, ufw, firewalld or an
//! administrator drops by policy or by an unconditional last rule, it gets a rule of ours that accepts traffic of our
//! interfaces only. What they may reach is decided by our own table alone. The rules are written the way
//! `iptables-nft` reads them, carry the instance's table name as comment, and are found by it again.

use std::net::Ipv4Addr;

use nlink::netlink::nftables::{ChainInfo, ChainType, Family, Policy, RawMessage, RuleInfo};
use nlink::netlink::{AttrIter, Connection, MessageBuilder, Nftables};

use super::address::{Plan, TABLE_PREFIX};
use super::netlink::CREATE;

/// Chain that Docker jumps to first and leaves to the administrator, whose word comes before ours.
const DOCKER_USER: &str = "DOCKER-USER";
const APPEND: u16 = 0x800;
const NEWRULE: u8 = 6;
const HOOK_INPUT: u32 = 1;
const HOOK_FORWARD: u32 = 2;

/// Where sandboxes are let through, and where not.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Settled {
    /// Chains that carry our rules.
    pub(super) carrying: Vec<String>,
    /// Chains that refuse them, and why: some tools keep their table to themselves.
    pub(super) refusing: Vec<(String, String)>,
}

/// Puts our rules where they are needed and takes them from where they no longer are. Changes nothing when all is
/// in place.
pub(super) async fn settle(connection: &Connection<Nftables>, plan: &Plan) -> nlink::Result<Settled> {
    let mark = plan.table();
    let mut settled = Settled::default();
    for (chain, rules) in hooked_chains(connection).await? {
        let wanted = if drops(&chain, &rules) { accepts(plan, chain.hook) } else { Vec::new() };
        let ours: Vec<&RuleInfo> =
            rules.iter().filter(|rule| rule.comment_text.as_deref() == Some(mark.as_str())).collect();
        let needed = !wanted.is_empty();
        let mut transaction = connection.transaction();
        let complete = ours.len() == wanted.len();
        for rule in ours {
            transaction = transaction.del_rule(&chain.table, &chain.name, chain.family, rule.handle);
        }
        let after = rules.iter().find(|rule| jumps_to(rule, DOCKER_USER)).map(|rule| rule.handle);
        for accept in wanted {
            transaction = transaction.raw(accept.message(&chain, &mark, after));
        }
        let changed = if complete { Ok(()) } else { transaction.commit(connection).await };
        let name = name(&chain);
        match changed {
            Ok(()) if needed => settled.carrying.push(name),
            Ok(()) => {}
            Err(error) => settled.refusing.push((name, error.to_string())),
        }
    }
    Ok(settled)
}

fn name(chain: &ChainInfo) -> String {
    format!("{} {} {}", chain.family, chain.table, chain.name)
}

/// Takes back every rule that carries `mark`.
pub(super) async fn withdraw(connection: &Connection<Nftables>, mark: &str) -> nlink::Result<()> {
    for (chain, rules) in hooked_chains(connection).await? {
        let ours: Vec<&RuleInfo> =
            rules.iter().filter(|rule| rule.comment_text.as_deref() == Some(mark)).collect();
        if ours.is_empty() {
            continue;
        }
        let mut transaction = connection.transaction();
        for rule in ours {
            transaction = transaction.del_rule(&chain.table, &chain.name, chain.family, rule.handle);
        }
        transaction.commit(connection).await?;
    }
    Ok(())
}

/// Chains of others that would drop traffic of sandboxes, for reports.
pub(super) async fn barriers(connection: &Connection<Nftables>) -> nlink::Result<Vec<String>> {
    let chains = hooked_chains(connection).await?;
    let dropping = chains.into_iter().filter(|(chain, rules)| drops(chain, rules));
    Ok(dropping.map(|(chain, _)| name(&chain)).collect())
}

/// Base chains of others on the way of IPv4 packets through and into the host, each with its rules.
async fn hooked_chains(connection: &Connection<Nftables>) -> nlink::Result<Vec<(ChainInfo, Vec<RuleInfo>)>> {
    let chains = connection.list_chains().await?;
    let mut found = Vec::new();
    for chain in chains {
        let relevant = matches!(chain.family, Family::Ip | Family::Inet)
            && matches!(chain.hook, Some(HOOK_INPUT | HOOK_FORWARD))
            && chain.chain_type == Some(ChainType::Filter)
            && !chain.table.starts_with(TABLE_PREFIX);
        if relevant {
            let rules = connection.list_rules(&chain.table, chain.family).await?;
            let rules = rules.into_iter().filter(|rule| rule.chain == chain.name).collect();
            found.push((chain, rules));
        }
    }
    Ok(found)
}

fn drops(chain: &ChainInfo, rules: &[RuleInfo]) -> bool {
    chain.policy == Some(Policy::Drop.to_u32()) || rules.iter().any(refuses_everything)
}

/// One rule of ours in a chain of somebody else.
#[derive(Debug, PartialEq, Eq)]
enum Accept {
    From(String),
    To(String),
    /// What a slot sends to the gateway address.
    ToGateway(String, Ipv4Addr),
}

fn accepts(plan: &Plan, hook: Option<u32>) -> Vec<Accept> {
    let prefix = plan.slot_prefix();
    match hook {
        Some(HOOK_FORWARD) => vec![Accept::From(prefix.clone()), Accept::To(prefix)],
        _ => vec![Accept::ToGateway(prefix, plan.gateway())],
    }
}

const REGISTER: u32 = 1;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
const META_NFPROTO: u32 = 15;

impl Accept {
    /// A new rule right behind rule `after`, or at the head of the chain.
    fn message(&self, chain: &ChainInfo, mark: &str, after: Option<u64>) -> RawMessage {
        // Only the attributes of this builder are used; the header is nlink's affair.
        let mut body = MessageBuilder::new(0, 0);
        body.append_attr_str(1, &chain.table);
        body.append_attr_str(2, &chain.name);
        if let Some(handle) = after {
            body.append_attr_u64_be(6, handle);
        }
        let list = body.nest_start(4);
        match self {
            Self::From(prefix) => meta_is(&mut body, META_IIFNAME, prefix.as_bytes()),
            Self::To(prefix) => meta_is(&mut body, META_OIFNAME, prefix.as_bytes()),
            Self::ToGateway(prefix, gateway) => {
                meta_is(&mut body, META_IIFNAME, prefix.as_bytes());
                if chain.family == Family::Inet {
                    meta_is(&mut body, META_NFPROTO, &[libc::NFPROTO_IPV4 as u8]);
                }
                destination_is(&mut body, *gateway);
            }
        }
        accept(&mut body);
        body.nest_end(list);
        body.append_attr(7, &comment(mark));
        let attributes = body.as_bytes()[nlink::netlink::NLMSG_HDRLEN..].to_vec();
        let flags = if after.is_some() { CREATE | APPEND } else { CREATE };
        RawMessage::new(NEWRULE, chain.family).flags(flags).attrs(attributes)
    }
}

/// libnftnl's form of a rule's comment: type 0, length, text with its terminator.
fn comment(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len() + 1).unwrap_or(u8::MAX);
    let mut bytes = vec![0, length];
    bytes.extend(text.bytes().take(usize::from(length) - 1));
    bytes.push(0);
    bytes
}

fn expression(body: &mut MessageBuilder, name: &str, data: impl FnOnce(&mut MessageBuilder)) {
    let element = body.nest_start(1);
    body.append_attr_str(1, name);
    let nest = body.nest_start(2);
    data(body);
    body.nest_end(nest);
    body.nest_end(element);
}

/// `meta KEY VALUE`; a value shorter than the key compares its beginning.
fn meta_is(body: &mut MessageBuilder, key: u32, value: &[u8]) {
    expression(body, "meta", |body| {
        body.append_attr_u32_be(2, key);
        body.append_attr_u32_be(1, REGISTER);
    });
    equals(body, value);
}

/// `ip daddr ADDRESS`.
fn destination_is(body: &mut MessageBuilder, address: Ipv4Addr) {
    const NETWORK_HEADER: u32 = 1;
    expression(body, "payload", |body| {
        body.append_attr_u32_be(1, REGISTER);
        body.append_attr_u32_be(2, NETWORK_HEADER);
        body.append_attr_u32_be(3, 16);
        body.append_attr_u32_be(4, 4);
    });
    equals(body, &address.octets());
}

fn equals(body: &mut MessageBuilder, value: &[u8]) {
    expression(body, "cmp", |body| {
        body.append_attr_u32_be(1, REGISTER);
        body.append_attr_u32_be(2, 0);
        let data = body.nest_start(3);
        body.append_attr(1, value);
        body.nest_end(data);
    });
}

fn accept(body: &mut MessageBuilder) {
    expression(body, "immediate", |body| {
        body.append_attr_u32_be(1, 0);
        let data = body.nest_start(2);
        let verdict = body.nest_start(2);
        body.append_attr_u32_be(1, libc::NF_ACCEPT.cast_unsigned());
        body.nest_end(verdict);
        body.nest_end(data);
    });
}

fn attribute(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    AttrIter::new(attributes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Names and data of a rule's expressions.
fn expressions(rule: &RuleInfo) -> impl Iterator<Item = (&[u8], &[u8])> {
    AttrIter::new(&rule.expression_bytes).map(|(_, element)| {
        (text(attribute(element, 1).unwrap_or_default()), attribute(element, 2).unwrap_or_default())
    })
}

/// Code and chain of a verdict in an `immediate` expression.
fn verdict(data: &[u8]) -> Option<(i32, &[u8])> {
    let verdict = attribute(attribute(data, 2)?, 2)?;
    let code = i32::from_be_bytes(*attribute(verdict, 1)?.first_chunk()?);
    Some((code, text(attribute(verdict, 2).unwrap_or_default())))
}

fn jumps_to(rule: &RuleInfo, chain: &str) -> bool {
    expressions(rule).any(|(name, data)| {
        name == b"immediate" && verdict(data).is_some_and(|(_, target)| target == chain.as_bytes())
    })
}

/// Does the rule drop or reject whatever reaches it?
fn refuses_everything(rule: &RuleInfo) -> bool {
    let mut refuses = false;
    for (name, data) in expressions(rule) {
        match name {
            b"counter" | b"log" => {}
            b"reject" => refuses = true,
            b"immediate" => refuses |= verdict(data).is_some_and(|(code, _)| code == libc::NF_DROP),
            // An iptables target that has no native form.
            b"target" => refuses |= attribute(data, 1).is_some_and(|name| text(name) == b"REJECT"),
            _ => return false,
        }
    }
    refuses
}
