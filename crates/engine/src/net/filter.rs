//! Changes of the packet filter, over one connection that any thread may use.

use std::sync::Mutex;

use nlink::blocking::Connection;
use nlink::netlink::{Netfilter, Nftables, netfilter::ConntrackFilter};

use super::address::{Plan, TABLE_PREFIX, table};
use super::error::NetError;
use super::foreign::{self, Settled};
use super::rules::{FAMILY, Policies, Ruleset};

/// What another instance's table says about the host, or ours from an earlier life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tables {
    /// Ours is there.
    pub(super) own: bool,
    /// Its comment.
    pub(super) note: Option<String>,
    /// Comments of other instances' tables.
    pub(super) others: Vec<String>,
}

/// The packet filter of one network namespace.
#[derive(Debug)]
pub(super) struct Filter {
    nftables: Connection<Nftables>,
    /// Made when a slot first had traffic to forget.
    conntrack: Mutex<Option<Connection<Netfilter>>>,
}

impl Filter {
    /// For the calling thread's namespace.
    pub(super) fn open() -> Result<Self, NetError> {
        let nftables = Connection::new().map_err(NetError::filter("reach nftables"))?;
        Ok(Self { nftables, conntrack: Mutex::new(None) })
    }

    pub(super) fn tables(&self, instance: &str) -> Result<Tables, NetError> {
        let name = table(instance);
        let mut found = Tables { own: false, note: None, others: Vec::new() };
        for table in self.nftables.list_tables().map_err(NetError::filter("list nftables tables"))? {
            if table.family != FAMILY || !table.name.starts_with(TABLE_PREFIX) {
                continue;
            }
            if table.name == name {
                found.own = true;
                found.note = table.comment;
            } else {
                found.others.push(table.comment.unwrap_or_default());
            }
        }
        Ok(found)
    }

    /// Puts our table into force, in place of the one that is there if any. Gives what [`Filter::fingerprint`]
    /// says then.
    pub(super) fn install(&self, policies: &Policies) -> Result<Vec<u64>, NetError> {
        const ACTION: &str = "install the packet filter of sandboxes";
        let ruleset = Ruleset::new(policies).map_err(NetError::filter(ACTION))?;
        let name = policies.plan.table();
        let staged = self.nftables.run(move |connection| {
            Box::pin(async move {
                let tables = connection.list_tables_in(FAMILY).await?;
                let replace = tables.iter().any(|table| table.name == name);
                ruleset.stage(connection.transaction(), replace).commit(connection).await
            })
        });
        staged.map_err(NetError::filter(ACTION))?;
        self.fingerprint(&policies.plan)
    }

    /// The numbers of our table's rules, which the kernel never gives twice: any change to them shows.
    pub(super) fn fingerprint(&self, plan: &Plan) -> Result<Vec<u64>, NetError> {
        let rules = self.nftables.list_rules(&plan.table(), FAMILY);
        let rules = rules.map_err(NetError::filter("read the packet filter of sandboxes"))?;
        Ok(rules.into_iter().map(|rule| rule.handle).collect())
    }

    /// Lets our interfaces through chains of others that drop.
    pub(super) fn settle_foreign(&self, plan: &Plan) -> Result<Settled, NetError> {
        let plan = plan.clone();
        let settled = self.nftables.run(move |c| Box::pin(async move { foreign::settle(c, &plan).await }));
        settled.map_err(NetError::filter("let sandboxes through another tool's packet filter"))
    }

    pub(super) fn barriers(&self) -> Result<Vec<String>, NetError> {
        let barriers = self.nftables.run(|connection| Box::pin(foreign::barriers(connection)));
        barriers.map_err(NetError::filter("read the packet filter"))
    }

    /// Removes our table and our rules in other tables.
    pub(super) fn remove(&self, instance: &str) -> Result<(), NetError> {
        let mark = table(instance);
        let name = mark.clone();
        let withdrawn =
            self.nftables.run(move |c| Box::pin(async move { foreign::withdraw(c, &mark).await }));
        withdrawn.map_err(NetError::filter("take rules back from another tool's packet filter"))?;
        let removed = self.nftables.del_table_if_exists(&name, FAMILY);
        removed.map(drop).map_err(NetError::filter("remove the packet filter of sandboxes"))
    }

    /// Forgets connections from a slot's address, which is about to get another owner: answers to the last one's
    /// questions must not reach the next. The kernel looks through all connections of the host for them.
    pub(super) fn forget(&self, address: std::net::Ipv4Addr) -> Result<(), NetError> {
        const ACTION: &str = "forget connections of an ended sandbox";
        let mut guard = self.conntrack.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let conntrack = match guard.take() {
            Some(conntrack) => guard.insert(conntrack),
            None => guard.insert(Connection::new().map_err(NetError::filter(ACTION))?),
        };
        let forgotten = conntrack.run(move |connection| {
            Box::pin(async move {
                connection.flush_conntrack_matching(&ConntrackFilter::new().orig_src(address)).await
            })
        });
        forgotten.map_err(NetError::filter(ACTION))
    }
}
