//! What the pool should do next: a pure function of what it has.

/// Ready slots of images other than the one used most.
const KEPT: usize = 4;
/// An image with less recent use than this is no longer prepared.
const FAINT: f64 = 0.05;
/// Share of the target below which preparing ahead does not wait for creates under way.
const LOW: usize = 4;

/// Use of one image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Use<'a> {
    pub(super) id: &'a str,
    pub(super) score: f64,
    pub(super) ready: usize,
}

/// The next thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Make one slot ready for this image.
    Prepare(String),
    /// Turn a ready slot of this image into a bare one.
    Dismantle(String),
    /// Forget an image that has nothing ready.
    Forget(String),
    /// Destroy a bare slot.
    Shrink,
}

/// Decides. `bare` slots are at hand, `can_make` says whether more can be made, `busy` that creates are under way.
pub(super) fn next(
    uses: &[Use<'_>],
    target: usize,
    bare: usize,
    can_make: bool,
    busy: bool,
) -> Option<Action> {
    let mut by_use: Vec<&Use<'_>> = uses.iter().collect();
    by_use.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| a.id.cmp(b.id)));
    let goal = |rank: usize, image: &Use<'_>| match rank {
        0 => target,
        _ if image.score < FAINT => 0,
        _ => KEPT.min(target),
    };
    for (rank, image) in by_use.iter().enumerate() {
        let goal = goal(rank, image);
        // While creates are under way they get the processors, unless they are about to find nothing ready.
        let may = !busy || image.ready < goal / LOW;
        if image.ready < goal && may && (bare > 0 || can_make) {
            return Some(Action::Prepare(image.id.to_owned()));
        }
    }
    if busy {
        return None;
    }
    for (rank, image) in by_use.iter().enumerate() {
        let goal = goal(rank, image);
        // Some slack, or two images in turn would be prepared and dismantled for ever.
        if image.ready > goal + goal / LOW {
            return Some(Action::Dismantle(image.id.to_owned()));
        }
        if goal == 0 && image.ready == 0 && rank > 0 {
            return Some(Action::Forget(image.id.to_owned()));
        }
    }
    (bare > target.max(KEPT)).then_some(Action::Shrink)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str, score: f64, ready: usize) -> Use<'_> {
        Use { id, score, ready }
    }

    #[test]
    fn the_most_used_image_comes_first_and_others_keep_a_few() {
        let prepare = |id: &str| Some(Action::Prepare(id.into()));
        assert_eq!(next(&[image("a", 1.0, 0), image("b", 9.0, 127)], 128, 0, true, false), prepare("b"));
        assert_eq!(next(&[image("a", 1.0, 0), image("b", 9.0, 128)], 128, 0, true, false), prepare("a"));
        assert_eq!(next(&[image("a", 1.0, 4), image("b", 9.0, 128)], 128, 0, true, false), None);
        assert_eq!(next(&[], 128, 0, true, false), None);
        assert_eq!(next(&[image("a", 1.0, 0)], 0, 0, true, false), None);
    }

    #[test]
    fn creates_go_first_unless_the_pool_runs_dry() {
        assert_eq!(next(&[image("a", 1.0, 100)], 128, 9, true, true), None);
        assert_eq!(next(&[image("a", 1.0, 31)], 128, 9, true, true), Some(Action::Prepare("a".into())));
    }

    #[test]
    fn what_is_too_much_goes() {
        let busy_b = image("b", 9.0, 8);
        let dismantle = Some(Action::Dismantle("a".into()));
        assert_eq!(next(&[image("a", 1.0, 6), busy_b], 8, 0, true, false), dismantle);
        assert_eq!(next(&[image("a", 1.0, 5), busy_b], 8, 0, true, false), None);
        assert_eq!(next(&[image("a", 0.01, 1), busy_b], 8, 0, true, false), dismantle);
        assert_eq!(next(&[image("a", 0.01, 0), busy_b], 8, 0, true, false), Some(Action::Forget("a".into())));
        assert_eq!(next(&[busy_b], 8, 9, true, false), Some(Action::Shrink));
        assert_eq!(next(&[busy_b], 8, 9, true, true), None);
    }

    #[test]
    fn it_comes_to_rest_from_any_state() {
        for ready in 0..40 {
            for other in 0..40 {
                let (mut a, mut b, mut bare, mut steps) = (ready, other, 10, 0);
                while let Some(action) =
                    next(&[image("a", 2.0, a), image("b", 1.0, b)], 16, bare, true, false)
                {
                    match action {
                        Action::Prepare(id) => {
                            *(if id == "a" { &mut a } else { &mut b }) += 1;
                            bare = bare.saturating_sub(1);
                        }
                        Action::Dismantle(id) => {
                            *(if id == "a" { &mut a } else { &mut b }) -= 1;
                            bare += 1;
                        }
                        Action::Shrink => bare -= 1,
                        Action::Forget(_) => unreachable!(),
                    }
                    steps += 1;
                    assert!(steps < 200, "{ready} {other}");
                }
            }
        }
    }
}
