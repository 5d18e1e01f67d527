//! The host's part of an instance's network: the pool, the gateway interface, the packet filter, forwarding.

use std::io;
use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};

use super::address::{Cidr, Plan, free_pool, gateway_interface, slot_index};
use super::error::NetError;
use super::filter::Filter;
use super::foreign::Settled;
use super::links::Links;
use super::netlink::absent;
use super::rules::{DNS, Policies};
use super::slot::set;
use super::{DOOMED, NetConfig};

const FORWARD: &str = "ipv4/ip_forward";
/// In the comment of our table: forwarding was off before sandboxes needed it. The last instance to leave restores
/// it.
const WAS_OFF: &str = "ip_forward was 0";
const WAS_ON: &str = "ip_forward was 1";

/// The host's part.
#[derive(Debug)]
pub(super) struct Host {
    filter: Filter,
    plan: Plan,
    installed: Mutex<Installed>,
}

#[derive(Debug)]
struct Installed {
    policies: Policies,
    fingerprint: Vec<u64>,
    foreign: Settled,
}

impl Host {
    pub(super) fn set_up(config: &NetConfig, links: &mut Links) -> Result<Self, NetError> {
        let filter = Filter::open()?;
        let (plan, gateway_exists) = plan(config, links)?;
        let tables = filter.tables(&config.instance)?;
        let first = !tables.own && !gateway_exists;
        let off = tables.note.iter().chain(&tables.others).any(|note| note == WAS_OFF);
        let forwarding = forwarding().map_err(NetError::system("read whether the host forwards packets"))?;
        let policies = Policies {
            plan: plan.clone(),
            mode: config.mode,
            allow_private: config.allow_private.clone(),
            dns_port: DNS,
            note: if off || !forwarding { WAS_OFF } else { WAS_ON }.to_owned(),
        };
        let mut finish = || {
            let fingerprint = filter.install(&policies)?;
            if !gateway_exists {
                let name = plan.gateway_interface();
                let added = links.add_gateway(&name, plan.gateway(), plan.pool());
                added.map_err(NetError::system(format!("make interface {name}")))?;
            }
            if !forwarding {
                set(FORWARD, "1")
                    .map_err(NetError::system("let the host forward packets (net.ipv4.ip_forward)"))?;
            }
            Ok(fingerprint)
        };
        let fingerprint = match finish() {
            Ok(fingerprint) => fingerprint,
            Err(error) => {
                if first && let Err(error) = purge(&config.instance) {
                    tracing::warn!(%error, "the network that could not be set up is not wholly removed");
                }
                return Err(error);
            }
        };
        Ok(Self {
            filter,
            plan,
            installed: Mutex::new(Installed { policies, fingerprint, foreign: Settled::default() }),
        })
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Sends DNS to the port where the forwarder listens.
    pub(super) fn redirect_dns(&self, port: u16) -> Result<(), NetError> {
        let mut installed = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        if installed.policies.dns_port == port {
            return Ok(());
        }
        let policies = Policies { dns_port: port, ..installed.policies.clone() };
        installed.fingerprint = self.filter.install(&policies)?;
        installed.policies = policies;
        Ok(())
    }

    /// Lets sandboxes through the packet filters of other tools.
    pub(super) fn settle(&self) -> Result<(), NetError> {
        let mut installed = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        let settled = self.filter.settle_foreign(&self.plan)?;
        if settled == installed.foreign {
            return Ok(());
        }
        if !settled.carrying.is_empty() {
            tracing::info!(chains = ?settled.carrying, "sandboxes are let through chains that drop by default");
        }
        for (chain, error) in &settled.refusing {
            let interfaces = format!("{}*", self.plan.slot_prefix());
            tracing::error!(
                chain,
                error,
                interfaces,
                "sandboxes have no network: this chain drops what they send and cannot be changed from here; accept \
                 their interfaces with the tool that made it"
            );
        }
        installed.foreign = settled;
        Ok(())
    }

    /// After a change from outside: puts back what is missing.
    pub(super) fn mend(&self) {
        let put_back = || {
            let mut installed = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
            // A table that is gone cannot be read.
            if self.filter.fingerprint(&self.plan).ok().as_ref() != Some(&installed.fingerprint) {
                installed.fingerprint = self.filter.install(&installed.policies)?;
                tracing::warn!(
                    "the packet filter of sandboxes was changed from outside and has been put back"
                );
            }
            drop(installed);
            self.settle()
        };
        if let Err(error) = put_back() {
            let error: NetError = error;
            tracing::error!(%error, "the packet filter of sandboxes could not be put back");
        }
    }
}

fn forwarding() -> io::Result<bool> {
    Ok(std::fs::read_to_string(format!("/proc/sys/net/{FORWARD}"))?.trim() == "1")
}

/// Who gets which address: as before if the gateway interface exists, as configured, or from a free range. Tells
/// whether the gateway interface exists.
fn plan(config: &NetConfig, links: &mut Links) -> Result<(Plan, bool), NetError> {
    let instance = config.instance.as_str();
    let routes = links.routes().map_err(NetError::system("list routes"))?;
    let name = gateway_interface(instance);
    let mut own = None;
    match links.index(&name) {
        Ok(index) => {
            let addresses = links.addresses(index).map_err(NetError::system(format!("read {name}")))?;
            if let Some(plan) = plan_of(instance, index, &addresses, &routes) {
                if config.pool.is_none_or(|pool| pool == plan.pool()) {
                    return Ok((plan, true));
                }
                let list = links.list().map_err(NetError::system("list interfaces"))?;
                if let (Some(wanted), true) =
                    (config.pool, list.iter().any(|link| slot_index(instance, &link.name).is_some()))
                {
                    return Err(NetError::PoolChanged { current: plan.gateway(), wanted });
                }
            }
            // Half made, or of another pool and unused: begin anew.
            links.delete(DOOMED, &[index]).map_err(NetError::system(format!("remove {name}")))?;
            own = Some(index);
        }
        Err(error) if absent(&error) => {}
        Err(error) => return Err(NetError::system(format!("find {name}"))(error)),
    }
    // Default routes, also those in halves that tunnels make, cover everything and mean nothing here.
    let taken: Vec<(Cidr, u32)> =
        routes.into_iter().filter(|(route, device)| route.prefix() >= 8 && own != Some(*device)).collect();
    let pool = match config.pool {
        Some(pool) => match taken.iter().find(|(route, _)| route.overlaps(&pool)) {
            None => pool,
            Some((route, device)) => {
                let list = links.list().map_err(NetError::system("list interfaces"))?;
                let device = list.into_iter().find(|link| link.index == *device);
                let device = device.map_or_else(|| "no interface".to_owned(), |link| link.name);
                return Err(NetError::PoolInUse { pool, route: *route, device });
            }
        },
        None => {
            let routes: Vec<Cidr> = taken.into_iter().map(|(route, _)| route).collect();
            free_pool(&routes).ok_or(NetError::NoFreePool)?
        }
    };
    Ok((Plan::new(instance, pool)?, false))
}

/// Reads the plan back from the gateway interface and its route.
fn plan_of(instance: &str, index: u32, addresses: &[Ipv4Addr], routes: &[(Cidr, u32)]) -> Option<Plan> {
    let [gateway] = addresses else { return None };
    let pool = routes
        .iter()
        .find(|(route, device)| *device == index && route.prefix() < 32 && route.contains(*gateway))?;
    Plan::new(instance, pool.0).ok().filter(|plan| plan.gateway() == *gateway)
}

/// Removes everything of an instance: slots, gateway, rules here and elsewhere; restores forwarding if nobody else of
/// ours needs it.
pub(super) fn purge(instance: &str) -> Result<(), NetError> {
    let mut links = Links::open().map_err(NetError::system("open a netlink socket"))?;
    let gateway = gateway_interface(instance);
    let doomed: Vec<u32> = links
        .list()
        .map_err(NetError::system("list interfaces"))?
        .into_iter()
        .filter(|link| link.name == gateway || slot_index(instance, &link.name).is_some())
        .map(|link| link.index)
        .collect();
    links.delete(DOOMED, &doomed).map_err(NetError::system("remove interfaces of sandboxes"))?;
    let filter = Filter::open()?;
    let tables = filter.tables(instance)?;
    filter.remove(instance)?;
    if tables.others.is_empty() && tables.note.as_deref() == Some(WAS_OFF) {
        set(FORWARD, "0").map_err(NetError::system("switch the host's packet forwarding off again"))?;
    }
    Ok(())
}
