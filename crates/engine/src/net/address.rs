//! Addresses: ranges, the plan of one instance's pool, and the choice of a free pool.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use super::error::NetError;

/// A range of IPv4 addresses. Bits below the prefix are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cidr {
    address: Ipv4Addr,
    prefix: u8,
}

/// The text is not an IPv4 range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an IPv4 range such as 10.1.0.0/16 or a single address")]
pub struct InvalidCidr(String);

impl Cidr {
    /// The range of `prefix` bits that holds `address`. A prefix above 32 is 32.
    #[must_use]
    pub const fn new(address: Ipv4Addr, prefix: u8) -> Self {
        let prefix = if prefix > 32 { 32 } else { prefix };
        Self { address: Ipv4Addr::from_bits(address.to_bits() & Self::mask(prefix)), prefix }
    }

    const fn mask(prefix: u8) -> u32 {
        if prefix == 0 { 0 } else { u32::MAX << (32 - prefix) }
    }

    /// First address.
    #[must_use]
    pub const fn first(&self) -> Ipv4Addr {
        self.address
    }

    /// Last address.
    #[must_use]
    pub const fn last(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.address.to_bits() | !Self::mask(self.prefix))
    }

    /// Number of leading bits that are fixed.
    #[must_use]
    pub const fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Is `address` in the range?
    #[must_use]
    pub const fn contains(&self, address: Ipv4Addr) -> bool {
        address.to_bits() & Self::mask(self.prefix) == self.address.to_bits()
    }

    /// Do the two have an address in common?
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.address) || other.contains(self.address)
    }
}

impl FromStr for Cidr {
    type Err = InvalidCidr;

    /// Host bits that are set are refused: they are usually a slip in the prefix.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidCidr(text.to_owned());
        let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
        let address: Ipv4Addr = address.parse().map_err(|_| invalid())?;
        let plain = prefix.len() <= 2 && prefix.bytes().all(|byte| byte.is_ascii_digit());
        let prefix = prefix.parse().ok().filter(|prefix| plain && *prefix <= 32).ok_or_else(invalid)?;
        let range = Self::new(address, prefix);
        if range.address == address { Ok(range) } else { Err(invalid()) }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// Ranges as disjoint, ordered pairs of first and last address: what an nftables interval set takes.
pub(super) fn merge(ranges: &[Cidr]) -> Vec<(Ipv4Addr, Ipv4Addr)> {
    let mut sorted: Vec<(u32, u32)> =
        ranges.iter().map(|range| (range.first().to_bits(), range.last().to_bits())).collect();
    sorted.sort_unstable();
    let mut merged: Vec<(u32, u32)> = Vec::with_capacity(sorted.len());
    for (first, last) in sorted {
        match merged.last_mut() {
            Some(previous) if first <= previous.1.saturating_add(1) => previous.1 = previous.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged.into_iter().map(|(first, last)| (first.into(), last.into())).collect()
}

/// Who has which address and interface name in one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    instance: String,
    pool: Cidr,
}

/// Digits of a slot's number in an interface name. With them the longest name has 15 characters, the kernel's limit.
const INDEX_DIGITS: u32 = 3;

impl Plan {
    pub(super) fn new(instance: &str, pool: Cidr) -> Result<Self, NetError> {
        check_instance(instance)?;
        if !(8..=28).contains(&pool.prefix()) {
            return Err(NetError::PoolSize(pool));
        }
        Ok(Self { instance: instance.to_owned(), pool })
    }

    pub(super) fn pool(&self) -> Cidr {
        self.pool
    }

    /// First address of the pool after the network's own.
    pub(super) fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.pool.first().to_bits() + 1)
    }

    pub(super) fn slots(&self) -> u32 {
        // Less network address, gateway and broadcast address.
        let addresses = (1_u32 << (32 - self.pool.prefix())) - 3;
        addresses.min(36_u32.pow(INDEX_DIGITS))
    }

    pub(super) fn address(&self, index: u32) -> Result<Ipv4Addr, NetError> {
        if index >= self.slots() {
            return Err(NetError::NoSuchSlot { index, pool: self.pool, slots: self.slots() });
        }
        Ok(Ipv4Addr::from_bits(self.gateway().to_bits() + 1 + index))
    }

    pub(super) fn gateway_interface(&self) -> String {
        gateway_interface(&self.instance)
    }

    pub(super) fn slot_prefix(&self) -> String {
        slot_prefix(&self.instance)
    }

    pub(super) fn slot_interface(&self, index: u32) -> String {
        let mut digits = [b'0'; INDEX_DIGITS as usize];
        let mut rest = index;
        for digit in digits.iter_mut().rev() {
            *digit = b"0123456789abcdefghijklmnopqrstuvwxyz"[(rest % 36) as usize];
            rest /= 36;
        }
        let digits: String = digits.iter().copied().map(char::from).collect();
        format!("{}{digits}", self.slot_prefix())
    }

    pub(super) fn table(&self) -> String {
        table(&self.instance)
    }
}

/// The instance id goes into names that the kernel bounds, and must not be another one's beginning when followed
/// by a letter that is no hexadecimal digit.
pub(super) fn check_instance(instance: &str) -> Result<(), NetError> {
    let valid = (6..=8).contains(&instance.len())
        && instance.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if valid { Ok(()) } else { Err(NetError::Instance(instance.to_owned())) }
}

pub(super) fn gateway_interface(instance: &str) -> String {
    format!("osb{instance}")
}

/// `v` is no hexadecimal digit: no instance's prefix begins another's.
pub(super) fn slot_prefix(instance: &str) -> String {
    format!("osb{instance}v")
}

/// The slot that an interface belongs to, if it is one of the instance's.
pub(super) fn slot_index(instance: &str, interface: &str) -> Option<u32> {
    let digits = interface.strip_prefix(&slot_prefix(instance))?;
    let canonical = digits.len() == INDEX_DIGITS as usize
        && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'z'));
    if canonical { u32::from_str_radix(digits, 36).ok() } else { None }
}

pub(super) fn table(instance: &str) -> String {
    format!("{TABLE_PREFIX}{instance}")
}

/// Beginning of every instance's table name.
pub(super) const TABLE_PREFIX: &str = "osb-";

/// The first pool that overlaps none of `routes`: rarely used pieces of the private ranges first, then of the
/// ranges for carriers and for benchmarks, which a host inside a network that routes all of 10/8 can still use.
pub(super) fn free_pool(routes: &[Cidr]) -> Option<Cidr> {
    let ten = (231..=247).chain(201..=230).map(|second| Cidr::new(Ipv4Addr::new(10, second, 0, 0), 16));
    let rest = [
        Cidr::new(Ipv4Addr::new(172, 30, 0, 0), 16),
        Cidr::new(Ipv4Addr::new(172, 26, 0, 0), 16),
        Cidr::new(Ipv4Addr::new(192, 168, 192, 0), 18),
        Cidr::new(Ipv4Addr::new(100, 99, 0, 0), 16),
        Cidr::new(Ipv4Addr::new(198, 19, 0, 0), 16),
    ];
    ten.chain(rest).find(|pool| !routes.iter().any(|route| route.overlaps(pool)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, proptest};

    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_parse_only_in_their_proper_form() {
        for good in ["10.0.0.0/8", "0.0.0.0/0", "192.168.1.5/32"] {
            assert_eq!(cidr(good).to_string(), good);
        }
        assert_eq!(cidr("192.168.1.5").prefix(), 32);
        for bad in ["", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0.0/", "10.0.0.0/008", "::/0"] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names_fit_the_kernel_and_find_their_slot() {
        let plan = Plan::new("0123abcd", cidr("10.231.0.0/16")).unwrap();
        assert_eq!(plan.gateway(), Ipv4Addr::new(10, 231, 0, 1));
        assert_eq!(plan.address(0).unwrap(), Ipv4Addr::new(10, 231, 0, 2));
        for index in [0, 35, 36, 1_000, plan.slots() - 1] {
            let name = plan.slot_interface(index);
            assert!(name.len() <= 15, "{name}");
            assert_eq!(slot_index("0123abcd", &name), Some(index));
            assert_eq!(
                slot_index("0123ab", &name),
                None,
                "an id that begins another is not confused with it"
            );
        }
        assert_eq!(slot_index("0123abcd", "osb0123abcd"), None);
        assert!(plan.address(plan.slots()).is_err());
        let small = Plan::new("abcdef", cidr("10.0.0.0/28")).unwrap();
        assert_eq!(small.slots(), 13);
        assert_eq!(small.address(12).unwrap(), Ipv4Addr::new(10, 0, 0, 14));
        for bad in ["", "abc", "ABCDEF", "abcdefab1", "ghijkl", "ab/cd."] {
            assert!(Plan::new(bad, cidr("10.0.0.0/16")).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_free_pool_avoids_the_routes() {
        assert_eq!(free_pool(&[]), Some(cidr("10.231.0.0/16")));
        assert_eq!(free_pool(&[cidr("10.231.4.0/24")]), Some(cidr("10.232.0.0/16")));
        let pool = free_pool(&[cidr("10.0.0.0/8"), cidr("172.16.0.0/12")]);
        assert_eq!(pool, Some(cidr("192.168.192.0/18")));
        assert_eq!(free_pool(&[cidr("0.0.0.0/0")]), None);
    }

    #[test]
    fn merged_ranges_touch_nowhere() {
        let all = ["10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/8", "255.255.255.255/32", "240.0.0.0/4"].map(cidr);
        assert_eq!(
            merge(&all),
            [
                (Ipv4Addr::new(10, 0, 0, 0), Ipv4Addr::new(11, 255, 255, 255)),
                (Ipv4Addr::new(240, 0, 0, 0), Ipv4Addr::BROADCAST),
            ]
        );
    }

    proptest! {
        #[test]
        fn merging_keeps_membership(ranges: Vec<(u32, u8)>, probe: u32) {
            let ranges: Vec<Cidr> =
                ranges.into_iter().map(|(bits, prefix)| Cidr::new(bits.into(), prefix % 33)).collect();
            let merged = merge(&ranges);
            for window in merged.windows(2) {
                assert!(window[0].1.to_bits() + 1 < window[1].0.to_bits());
            }
            let probes = ranges.iter().flat_map(|range| [range.first(), range.last()]).chain([probe.into()]);
            for probe in probes {
                let inside = merged.iter().any(|(first, last)| (*first..=*last).contains(&probe));
                assert_eq!(inside, ranges.iter().any(|range| range.contains(probe)));
            }
        }

        #[test]
        fn overlap_is_symmetric(a in any::<(u32, u8)>(), b in any::<(u32, u8)>()) {
            let (a, b) = (Cidr::new(a.0.into(), a.1), Cidr::new(b.0.into(), b.1));
            assert_eq!(a.overlaps(&b), b.overlaps(&a));
        }
    }
}
