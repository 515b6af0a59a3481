//! Who may use a donor, and how much of it: rules for members of the cluster, and accounts of what
//! each member uses. With a policy, a member that no rule names may use nothing.

use fabric_host::lock;
use fabric_identity::{Holder, HolderPattern, Subject};
use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

/// What is accounted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Resource {
    /// Bytes of leases until their memory is unmapped, and of memory lent with vCPUs.
    Bytes,
    /// Leases.
    Leases,
    /// Connections, from their handshake on.
    Connections,
    /// Bytes of leases that are registered for RDMA.
    PinnedBytes,
    /// vCPUs.
    Cpus,
}

impl Resource {
    /// Returns the option of a rule that limits it.
    const fn option(self) -> &'static str {
        match self {
            Self::Bytes => "bytes=",
            Self::Leases => "leases=",
            Self::Connections => "connections=",
            Self::PinnedBytes => "pinned=",
            Self::Cpus => "cpus=",
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "bytes of memory",
            Self::Leases => "lease(s)",
            Self::Connections => "connection(s)",
            Self::PinnedBytes => "bytes of memory for RDMA",
            Self::Cpus => "vCPU(s)",
        })
    }
}

/// Amounts of each resource: limits, or what is used.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Amounts<T> {
    /// Of [`Resource::Bytes`].
    pub bytes: T,
    /// Of [`Resource::Leases`].
    pub leases: T,
    /// Of [`Resource::Connections`].
    pub connections: T,
    /// Of [`Resource::PinnedBytes`].
    pub pinned_bytes: T,
    /// Of [`Resource::Cpus`].
    pub cpus: T,
}

impl<T> Amounts<T> {
    const fn of(&self, resource: Resource) -> &T {
        match resource {
            Resource::Bytes => &self.bytes,
            Resource::Leases => &self.leases,
            Resource::Connections => &self.connections,
            Resource::PinnedBytes => &self.pinned_bytes,
            Resource::Cpus => &self.cpus,
        }
    }

    const fn of_mut(&mut self, resource: Resource) -> &mut T {
        match resource {
            Resource::Bytes => &mut self.bytes,
            Resource::Leases => &mut self.leases,
            Resource::Connections => &mut self.connections,
            Resource::PinnedBytes => &mut self.pinned_bytes,
            Resource::Cpus => &mut self.cpus,
        }
    }
}

/// What each of some members may use; `None` is as much as there is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    /// The members.
    pub members: HolderPattern,
    /// The limits of each of them.
    pub limits: Amounts<Option<u64>>,
    /// Addresses that their ports for RDMA may have, beside those by which they are connected.
    pub gids: Vec<IpAddr>,
}

/// Why a member may not use something.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Denied {
    /// The peer has shown no certificate.
    #[error(
        "this node has a policy, and the peer has shown no certificate; give --credentials DIR"
    )]
    Nobody,
    /// No rule names the member.
    #[error("no rule of this node names {0}; add --allow {0} there")]
    Unnamed(Holder),
    /// A limit is reached.
    #[error(
        "{holder} asks for {asked} {resource} and has {used}, {limit} is its limit on this node; end \
         what it does not need, or raise {option} of its --allow there",
        option = resource.option()
    )]
    Limit {
        /// The member.
        holder: Holder,
        /// What it asks for.
        resource: Resource,
        /// How much.
        asked: u64,
        /// How much it has.
        used: u64,
        /// Its limit.
        limit: u64,
    },
}

/// The rules of a donor, and what its users have.
#[derive(Debug)]
pub struct Accounts {
    /// The closest first.
    rules: Mutex<Vec<Rule>>,
    used: Mutex<HashMap<Holder, Amounts<u64>>>,
}

fn closest_first(mut rules: Vec<Rule>) -> Vec<Rule> {
    rules.sort_by_key(|rule| std::cmp::Reverse(rule.members.closeness()));
    rules
}

impl Accounts {
    /// Creates accounts under these rules. Of several that name a member, the closest one is for it.
    #[must_use]
    pub fn new(rules: Vec<Rule>) -> Arc<Self> {
        Arc::new(Self {
            rules: Mutex::new(closest_first(rules)),
            used: Mutex::default(),
        })
    }

    /// Replaces the rules. What members have stays charged, also beyond a new limit: only what they
    /// ask for from here on is compared with it.
    pub(super) fn replace(&self, rules: Vec<Rule>) {
        *self.rules() = closest_first(rules);
    }

    /// Returns whether a rule names the member.
    #[must_use]
    pub fn names(&self, holder: &Holder) -> bool {
        self.limits(holder).is_ok()
    }

    /// Returns the number of rules.
    #[must_use]
    pub fn count(&self) -> usize {
        self.rules().len()
    }

    fn rules(&self) -> MutexGuard<'_, Vec<Rule>> {
        lock(&self.rules)
    }

    fn limits(&self, holder: &Holder) -> Result<Amounts<Option<u64>>, Denied> {
        let rules = self.rules();
        let rule = rules.iter().find(|rule| rule.members.names(holder));
        rule.map(|rule| rule.limits)
            .ok_or_else(|| Denied::Unnamed(holder.clone()))
    }

    /// Returns the addresses that the ports of a member may have, beside those by which it is
    /// connected.
    pub(super) fn gids(&self, holder: &Holder) -> Vec<IpAddr> {
        let rules = self.rules();
        let rule = rules.iter().find(|rule| rule.members.names(holder));
        rule.map(|rule| rule.gids.clone()).unwrap_or_default()
    }

    /// Returns how much more a member may use; `None` when there is no limit.
    ///
    /// # Errors
    ///
    /// Fails when no rule names it.
    pub fn left(
        &self,
        member: Option<&Subject>,
        resource: Resource,
    ) -> Result<Option<u64>, Denied> {
        let holder = &member.ok_or(Denied::Nobody)?.holder;
        let limits = self.limits(holder)?;
        let used = lock(&self.used);
        let used = used.get(holder).map_or(0, |used| *used.of(resource));
        Ok(limits.of(resource).map(|limit| limit.saturating_sub(used)))
    }

    /// Charges a member with an amount, until the result is dropped.
    ///
    /// # Errors
    ///
    /// Fails when no rule names it, or its limit would be exceeded.
    pub fn charge(
        self: &Arc<Self>,
        member: Option<&Subject>,
        resource: Resource,
        amount: u64,
    ) -> Result<Charge, Denied> {
        let holder = &member.ok_or(Denied::Nobody)?.holder;
        let limits = self.limits(holder)?;
        let mut used = lock(&self.used);
        let has = used.get(holder).map_or(0, |used| *used.of(resource));
        let after = has.saturating_add(amount);
        if let Some(limit) = *limits.of(resource)
            && after > limit
        {
            return Err(Denied::Limit {
                holder: holder.clone(),
                resource,
                asked: amount,
                used: has,
                limit,
            });
        }
        *used.entry(holder.clone()).or_default().of_mut(resource) = after;
        drop(used);
        Ok(Charge {
            accounts: Arc::clone(self),
            holder: holder.clone(),
            resource,
            amount,
        })
    }

    /// Returns what each member uses now. Members that use nothing are omitted.
    #[must_use]
    pub fn used(&self) -> HashMap<Holder, Amounts<u64>> {
        lock(&self.used).clone()
    }
}

/// What a member was charged with. Dropping it returns the amount.
#[derive(Debug)]
pub struct Charge {
    accounts: Arc<Accounts>,
    holder: Holder,
    resource: Resource,
    amount: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut used = lock(&self.accounts.used);
        if let Some(has) = used.get_mut(&self.holder) {
            let amount = has.of_mut(self.resource);
            *amount = amount.saturating_sub(self.amount);
            if *has == Amounts::default() {
                used.remove(&self.holder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(holder: &str) -> Subject {
        let uri = format!("spiffe://prod/ssi-hv/{holder}");
        uri.parse().expect("an identity")
    }

    fn rule(members: &str, limits: Amounts<Option<u64>>) -> Rule {
        let members = members.parse().expect("a pattern");
        Rule {
            members,
            limits,
            gids: Vec::new(),
        }
    }

    fn leases(limit: u64) -> Amounts<Option<u64>> {
        Amounts {
            leases: Some(limit),
            ..Amounts::default()
        }
    }

    #[test]
    fn who_is_not_named_may_use_nothing() {
        let accounts = Accounts::new(vec![rule("vm/web", Amounts::default())]);
        let charge = |who: Option<&Subject>| accounts.charge(who, Resource::Leases, 1).map(drop);
        assert_eq!(charge(Some(&member("vm/web"))), Ok(()));
        assert_eq!(charge(None), Err(Denied::Nobody));
        for other in ["vm/web2", "node/web"] {
            let error = charge(Some(&member(other))).expect_err(other);
            assert!(error.to_string().contains(&format!("add --allow {other}")));
        }
        let none = Accounts::new(Vec::new());
        assert!(
            none.charge(Some(&member("vm/web")), Resource::Bytes, 0)
                .is_err()
        );
    }

    #[test]
    fn the_closest_rule_counts_and_each_member_has_its_own_limit() {
        let accounts = Accounts::new(vec![
            rule("vm/*", leases(1)),
            rule("vm/web-1", leases(0)),
            rule("vm/web-*", leases(2)),
        ]);
        let charge = |who: &str| accounts.charge(Some(&member(who)), Resource::Leases, 1);
        assert!(charge("vm/web-1").is_err());
        let first = [
            charge("vm/web-2"),
            charge("vm/web-2"),
            charge("vm/web-3"),
            charge("vm/db"),
        ];
        assert!(first.iter().all(Result::is_ok), "{first:?}");
        let error = charge("vm/web-2").expect_err("a third one").to_string();
        assert!(
            error.contains("asks for 1 lease(s) and has 2, 2 is its limit"),
            "{error}"
        );
        assert!(error.contains("raise leases="), "{error}");
        let left = accounts.left(Some(&member("vm/web-3")), Resource::Leases);
        assert_eq!(left, Ok(Some(1)));
        drop(first);
        assert_eq!(accounts.used(), HashMap::new());
        charge("vm/web-2").expect("it was returned");
    }

    #[test]
    fn no_amount_overflows_a_limit() {
        let limits = Amounts {
            bytes: Some(u64::MAX - 1),
            ..Amounts::default()
        };
        let accounts = Accounts::new(vec![rule("vm/web", limits)]);
        let web = member("vm/web");
        let charge = |amount| accounts.charge(Some(&web), Resource::Bytes, amount);
        let _some = charge(4096).expect("within the limit");
        assert!(charge(u64::MAX).is_err());
        assert!(charge(u64::MAX - 4096).is_err());
        assert!(charge(u64::MAX - 4097).is_ok());
    }
}
